"""Measures the scripts: speed/ whole runs, studies/ single questions, report/ the tables and figures of both."""
