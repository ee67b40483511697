"""Programs run statement by statement, for tests of everything else."""
