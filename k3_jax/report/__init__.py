"""One page of HTML about a run of training, from what the run left in its folder.

record.py reads, sections.py says what is drawn and what a healthy run looks like there, figures.py
draws, page.py sets the page. Nothing here touches a device: a run that goes on is not disturbed.
"""
