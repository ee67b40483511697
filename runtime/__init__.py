"""What exists only once there are devices: meshes, options, dumps."""
