"""Measurements of the scripts: whole runs in speed/, single questions in studies/, tables and figures in report/."""
