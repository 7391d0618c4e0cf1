"""Facts from published studies, with their sources: to set one's own results beside."""
