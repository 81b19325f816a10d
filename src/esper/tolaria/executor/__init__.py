"""A native executor for small hosts: whole epochs in one compiled call."""
