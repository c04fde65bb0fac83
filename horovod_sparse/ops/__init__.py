"""The operations on arrays that a framework supplies. Imports no framework."""
