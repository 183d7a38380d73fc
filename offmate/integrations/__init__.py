"""What offmate adds to other libraries' training loops; each module needs its library."""
