"""The algorithms, framework-neutral: one small file each."""
