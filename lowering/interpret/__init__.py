"""Programs run statement by statement on NumPy arrays: a second opinion on emission."""
