#!/usr/bin/env python3
"""A program for host.json's `notify`: posts a notice to a webhook, sends it as mail, or both.

    NOTIFY_WEBHOOK=https://...       is sent {"text": "..."} (the form of Slack, Mattermost and others)
    NOTIFY_MAIL=ada@example.org      through the machine's sendmail

Set them in host.json's `env`. Only Python's own library is used. Exit code 1 if nothing could be sent: run.log says so.
"""

from __future__ import annotations

import email.message
import json
import os
import subprocess
import sys
import urllib.request


def main() -> int:
    """Send the notice on standard input."""
    notice = json.load(sys.stdin)
    title = f"{notice['line']} on {notice['host']}: {notice['event'].replace('_', ' ')}"
    update = "" if notice["tokens"] is None else f"\nupdate {notice['update']:,}, {notice['tokens']:,} tokens"
    text = f"{notice['text']}{update}\n{notice['run']}"
    webhook, mail = os.environ.get("NOTIFY_WEBHOOK"), os.environ.get("NOTIFY_MAIL")
    if webhook:
        post(webhook, f"*{title}*\n{text}")
    if mail:
        send(mail, title, text)
    if not (webhook or mail):
        print("set NOTIFY_WEBHOOK or NOTIFY_MAIL in host.json's env", file=sys.stderr)
        return 1
    return 0


def post(url: str, text: str) -> None:
    """Post to a webhook."""
    body = json.dumps({"text": text}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()


def send(to: str, title: str, text: str) -> None:
    """Send a mail."""
    message = email.message.EmailMessage()
    message["To"], message["Subject"] = to, title
    message.set_content(text)
    subprocess.run(["sendmail", "-t"], input=message.as_bytes(), check=True, timeout=30)


if __name__ == "__main__":
    sys.exit(main())
