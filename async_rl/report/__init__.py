"""What is made of a run folder for people: ``report.html`` (self-contained, no script) and ``trace.json``.

page ─► sections ─► svg, style          trace, usage: the timeline as events and as shares of time
"""
