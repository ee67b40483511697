"""What has to hold of a program after every pass."""
