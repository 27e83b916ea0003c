"""The dashboard: a local web server that shows the runs of a folder, from their files."""
