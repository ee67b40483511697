"""Units: made, run on a device's part, segmented, and what they make let go."""
