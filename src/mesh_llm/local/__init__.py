"""This machine: its hardware, and the models on its disk.

hardware      native libraries, devices, memory, speed
model_files   the mesh's model, and where its files lie here
model_names   what a model's name means here: the user's catalog and all stores
absent_model  what is known of a model before it is downloaded
catalog_update  a catalog that somebody else keeps and signs
draft_model   which draft model the creator chooses, and where its file lies here
own_settings  the mesh's settings as this node's options ask for them
modalities    what a model does beside text
machine_use   whether somebody uses it: input, power, heat, games
lending_rules  when it is lent, by that
side_files    files that go with the model: which ones its creator has, and where they lie here
"""
