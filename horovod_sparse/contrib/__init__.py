"""What the exchange of gradients does without: local updates, uneven data, logs. Nothing but adapters' names leads here."""
