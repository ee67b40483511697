"""What XLA made of a program, and what overlapped when it ran."""
