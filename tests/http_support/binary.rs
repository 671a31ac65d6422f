//! The real binary as a child process, on a free port, with a configuration of its own.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::http_support::wire::{Answer, Leave, Request, exchange};

pub struct Binary {
    child: Child,
    pub address: SocketAddr,
    /// What it wrote to standard error so far.
    pub log: Arc<Mutex<String>>,
    _folder: tempfile::TempDir,
}

/// How to start it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Start {
    /// Further lines of the `[server]` table.
    pub server: String,
    /// Lines of the `[engine]` table.
    pub engine: String,
    /// Value of KDTREE_FAULT.
    pub fault: Option<String>,
    /// One key in the key file.
    pub key: Option<String>,
}

impl Binary {
    /// Starts it without waiting for anything.
    pub fn spawn(start: &Start) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut config = format!("[server]\nport = {port}\n{}\n", start.server);
        if let Some(key) = &start.key {
            let file = folder.path().join("keys");
            std::fs::write(&file, format!("{key}\n")).unwrap();
            config.push_str(&format!("api_key_file = {:?}\n", file.display().to_string()));
        }
        config.push_str(&format!("[engine]\ndevice = \"cpu\"\n{}\n", start.engine));
        // The gate has tests of its own.
        config.push_str("[gate]\nenable = false\n");
        let file = folder.path().join("kdtree.toml");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kdtree"));
        command.arg("serve").arg("--config").arg(&file).env("XDG_CACHE_HOME", folder.path()).env("HOME", folder.path());
        command.env_remove("KDTREE_FAULT").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        if let Some(fault) = &start.fault {
            command.env("KDTREE_FAULT", fault);
        }
        let mut child = command.spawn().expect("the binary starts");
        let log = Arc::new(Mutex::new(String::new()));
        let (stderr, written) = (child.stderr.take().unwrap(), log.clone());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut log = written.lock().unwrap();
                log.push_str(&line);
                log.push('\n');
            }
        });
        Self { child, address: SocketAddr::from(([127, 0, 0, 1], port)), log, _folder: folder }
    }

    /// Starts it and waits until it is ready.
    pub fn start(start: &Start) -> Self {
        let mut binary = Self::spawn(start);
        let begun = Instant::now();
        while binary.get("/health").is_none_or(|answer| answer.status != 200) {
            if let Some(status) = binary.child.try_wait().unwrap() {
                panic!("the server ended with {status} before it was ready:\n{}", binary.log.lock().unwrap());
            }
            assert!(begun.elapsed() < Duration::from_secs(180), "the server was not ready in time:\n{}", binary.log.lock().unwrap());
            std::thread::sleep(Duration::from_millis(50));
        }
        binary
    }

    pub fn get(&self, path: &str) -> Option<Answer> {
        exchange(self.address, &Request::get(path), Leave::Never).ok()
    }

    pub fn send(&self, request: &Request) -> Answer {
        exchange(self.address, request, Leave::Never).unwrap_or_else(|error| panic!("{} {}: {error}", request.method, request.path))
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: kill only sends a signal; the process is our child and has not been waited for.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// The exit code, once it has ended; `None` if it has not within `most`.
    pub fn exit(&mut self, most: Duration) -> Option<i32> {
        let begun = Instant::now();
        while begun.elapsed() < most {
            if let Some(status) = self.child.try_wait().unwrap() {
                return Some(status.code().unwrap_or(-1));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }

    /// Resident memory in bytes.
    pub fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or("");
        line.split_whitespace().nth(1).and_then(|kilobytes| kilobytes.parse::<u64>().ok()).unwrap_or(0) * 1024
    }

    /// The sum of a metric's samples.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").map(|answer| answer.text()).unwrap_or_default();
        let samples = text.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
        samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }
}

impl Drop for Binary {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
