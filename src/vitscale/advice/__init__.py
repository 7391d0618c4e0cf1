"""Advice: what to rent, from what is predicted. Pure: predictions in, answers out.

request       what is asked for, the work to be done, and an option: one configuration with what is expected of it
comparable_series   which measured series advice is about, and what they say of the work
candidates    every rank count, engine and batch that the model allows
forecast_table   what is expected of each of them
answers       limits held against it; fastest, cheapest, most ranks, the knee
pipeline      all of this, one after the other
next_measurement   which one measurement would narrow an answer most
study_text    an answer as a study file, and the command that would start it
job_files     the same as a file of SkyPilot's or of Kubernetes'
sentences, printing   how it is told, as text and as JSON
"""
