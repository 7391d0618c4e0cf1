"""The report: what a results folder says, as one document in every form, as pictures and as data.

answers     what a reader asks first
document    all of it, as `present.document` has it; sentences and tables are its content
charts      one file a subject: its rows and its Vega-Lite
contract    JSON with a version; CSV and Parquet with a row per trial and per run
forms       which forms there are, and which of them a file's name means
outputs     where each form goes
imported    what an import says
like        published studies' figures from these results
"""
