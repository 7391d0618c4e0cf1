"""Cannot be imported."""

raise OSError("the licence server does not answer")
