"""An engine that averages parameters now and then, in a folder like those of vitscale's own."""
