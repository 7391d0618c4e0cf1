"""Advice: what to rent, from what is predicted. Pure: predictions in, answers out.

quantities    durations and limits as a command line has them
request       what is asked for, and the work to be done
family        which measured series advice is about
counts        rank counts worth looking at
candidates    every engine, batch and rank count that the model allows
landscape     what is expected of each of them
judging       limits held against it
answers       fastest, cheapest, most ranks, the knee
option        one configuration with what is expected of it
advising      all of this, one after the other
narrowing     which one measurement would narrow an answer most
study_text    an answer as a study file
launch_line   the command that would start it
words, printing, as_json   how it is told
"""
