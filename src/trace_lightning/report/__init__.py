"""`report.html` of a run and `trace-fit compare`: what people look at. Files are read, nothing of a run is changed.

files    whole-file writes, lines that are complete     run      what a run's folder says
series   curves of a bounded number of points           samples  completions, a bounded number of them
charts   which metrics share a chart, and their bands   html     style and tables, shared with the probe's page
page     one run                                        compare  several runs, side by side
command  options                                        assets   style sheet; the charts and the sample browser

The page opens offline, so charts are drawn by a script of our own inside the file: a plotting library would add its 1
to 4 MB to every run.
"""
