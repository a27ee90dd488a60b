"""What a run survives, and how it finds out.

Reading path: elastic.py (another number of ranks), watch.py (what the loop calls), heartbeat.py and straggler.py (dead,
hung, slow, silent), replica_check.py (corrupted weights), loss_spike.py (back to the last good step), goodput.py (where
the time went). train/run_folder.py has the lock.
"""
