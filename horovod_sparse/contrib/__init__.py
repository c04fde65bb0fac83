"""What the exchange of gradients does without: local updates. Nothing but adapters' names leads here."""
