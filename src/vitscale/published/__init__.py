"""Facts from published studies, with their sources: to set one's own results beside."""

from vitscale.published.facts import Fact, Layout, Published, Source, published

__all__ = ["Fact", "Layout", "Published", "Source", "published"]
