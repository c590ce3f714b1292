"""Measurements. Each module that is a program prints a table; see README.md."""
