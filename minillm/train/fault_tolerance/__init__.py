"""What a run survives, and how it finds out.

Reading path: elastic.py (another number of ranks), heartbeat.py (dead, hung and silent ranks; what the loop calls),
straggler.py (slow ranks), replica_check.py (corrupted weights), loss_spike.py (back to the last good step), goodput.py
(where the time went). train/run_folder.py has the lock.
"""
