"""mlxpool as a service of the user's own session: started at login, restarted when it fails.

What is promised is one `Spec`; launchd.py and systemd.py write it down in their manager's language (pure),
manager.py says what a manager can be asked, launchctl.py and systemctl.py ask it, setup.py installs and
uninstalls. Nothing here runs inside the server.
"""
