"""What the exchange of gradients does without: local updates, logs. Nothing but adapters' names leads here."""
