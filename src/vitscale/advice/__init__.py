"""Advice: what to rent, from what is predicted. Pure: predictions in, answers out.

request       what is asked for, and the work to be done
comparable_series   which measured series advice is about, and what they say of the work
candidates    every rank count, engine and batch that the model allows
forecast_table   what is expected of each of them
limits        limits held against it
answers       fastest, cheapest, most ranks, the knee
option        one configuration with what is expected of it
pipeline      all of this, one after the other
next_measurement   which one measurement would narrow an answer most
study_text    an answer as a study file, and the command that would start it
sentences, printing, as_json   how it is told
"""
