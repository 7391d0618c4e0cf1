"""What an engine does in an optimizer step: what it sends and when, what compute hides of it, and who is waited for."""
