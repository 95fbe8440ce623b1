"""`assay serve` as a child process, for scripts that talk to it."""
import json
import subprocess
import time
import urllib.error
import urllib.request


class Server:
    """Runs `assay serve MODEL OPTIONS…` on a device. `port` 0 takes a free port."""

    def __init__(self, assay, model, *options, port=0, wait=True, device="cpu"):
        self.process = subprocess.Popen(
            [str(assay), "serve", str(model), "--port", str(port), "--device", device, "--json",
             *map(str, options)], stdout=subprocess.PIPE, text=True)
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"assay serve ended with code {self.process.wait()}")
            text += line
        started = json.loads(text)
        if "url" not in started:  # the program has said why
            raise RuntimeError(f"assay serve ended with code {self.process.wait()}")
        self.url, self.port = started["url"], started["port"]
        while wait and self.status("/health") == 503:
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def status(self, path):
        try:
            return urllib.request.urlopen(self.url + path).status
        except urllib.error.HTTPError as error:
            return error.code

    def get(self, path):
        return urllib.request.urlopen(self.url + path).read().decode()

    def metric(self, name):
        lines = [line.split() for line in self.get("/metrics").splitlines()]
        return float(next(line[1] for line in lines if line[0] == name))

    def resident_bytes(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            line = next(line for line in status if line.startswith("VmRSS"))
        return 1024 * int(line.split()[1])

    def stop(self):
        """Ends the server by SIGTERM, if it still runs. → its exit code"""
        if self.process.poll() is None:
            self.process.terminate()
        return self.wait()

    def kill(self):
        self.process.kill()
        return self.wait()

    def wait(self):
        """→ the exit code, or minus the number of the signal that ended the server"""
        self.process.wait()
        self.process.stdout.close()
        return self.process.returncode
