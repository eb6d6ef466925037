"""The study that sets NeuronSpark's presets: a corpus, arms, a table of runs that fills itself, and its report.

corpus.py   text of packages -> tokens          arms.py     the models that are compared
run.py      runs what the table lacks            report.py   tables and curves from the table
"""
