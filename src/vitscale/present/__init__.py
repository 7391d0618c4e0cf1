"""One way to present: a verb makes a `document.Document` of plain values; terminal, Markdown and page lay it out.

What a function of the API returns, a `verb_result.VerbResult`, has that document, and the fields of --json.

Figures become text in `units` alone, a value and its interval are one `estimate.Estimate`, and what a verb prints with
--json has the envelope of `data`.
"""
