"""Models that others use to predict scaling, each with the same kind of interval, to stand beside ours."""
