"""What the ranks send each other: messages, protocols, and their cost. Imports no framework."""
