"""Experiments on one machine: split engines, delay lines, faults, side-by-side benchmarks."""
