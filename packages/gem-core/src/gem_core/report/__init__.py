"""``gemrec report``: one HTML page about a run, with everything in it. See `gem_core.report.page`."""
