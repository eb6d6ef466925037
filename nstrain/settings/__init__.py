"""What a person writes - host.json and run.json - read and validated once, at the door."""
