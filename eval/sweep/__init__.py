"""A grid of cache configurations, its frontier and its report page."""
