//! A server as a service manager starts it: with a notification socket, a watchdog and a state directory.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::http_support::wire::{Answer, Leave, Request, exchange};

pub const WATCHDOG: Duration = Duration::from_millis(800);

/// The longest a test waits for anything.
const PATIENCE: Duration = Duration::from_secs(600);

pub struct Manager {
    child: Child,
    address: SocketAddr,
    said: Arc<Mutex<Vec<String>>>,
    log: Arc<Mutex<Vec<u8>>>,
    /// `None` once it was handed on.
    folder: Option<tempfile::TempDir>,
}

impl Manager {
    /// Starts a server with these lines in its `[gate]` table.
    pub fn start(gate: &str, fault: Option<&str>) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), gate, fault)
    }

    /// The same in a folder whose state is kept.
    pub fn start_in(folder: tempfile::TempDir, gate: &str, fault: Option<&str>) -> Self {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let config = folder.path().join("kdtree.toml");
        let keys = folder.path().join("keys");
        std::fs::write(&keys, "key\n").unwrap();
        let server = format!("port = {}\napi_key_file = {:?}\ndeath_grace_s = 0.2", address.port(), keys.display().to_string());
        std::fs::write(&config, format!("[server]\n{server}\n[engine]\ndevice = \"cpu\"\n[gate]\n{gate}\n")).unwrap();
        let path = folder.path().join("notify");
        let _ = std::fs::remove_file(&path);
        let socket = UnixDatagram::bind(&path).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kdtree"));
        command.arg("serve").arg("--config").arg(&config).env("NOTIFY_SOCKET", &path);
        command.env("WATCHDOG_USEC", WATCHDOG.as_micros().to_string()).env_remove("WATCHDOG_PID");
        command.env("STATE_DIRECTORY", folder.path().join("state")).env_remove("KDTREE_FAULT").env_remove("RUST_LOG");
        if let Some(fault) = fault {
            command.env("KDTREE_FAULT", fault);
        }
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (said, log) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
        let (heard, written, mut stderr) = (said.clone(), log.clone(), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            let mut buffer = [0; 65536];
            while let Ok(length) = socket.recv(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                heard.lock().unwrap().extend(text.lines().map(String::from));
            }
        });
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = stderr.read(&mut buffer) {
                written.lock().unwrap().extend_from_slice(&buffer[..length]);
            }
        });
        Self { child, address, said, log, folder: Some(folder) }
    }

    /// The folder, for another start on the same state.
    pub fn into_folder(mut self) -> tempfile::TempDir {
        self.folder.take().expect("handed on once")
    }

    /// Every line the manager was told so far.
    pub fn said(&self) -> Vec<String> {
        self.said.lock().unwrap().clone()
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&self.log.lock().unwrap()).into_owned()
    }

    /// Waits until a line that begins so was told.
    pub fn wait_for(&self, line: &str) {
        self.wait(line, || self.said().iter().any(|said| said.starts_with(line)));
    }

    pub fn wait(&self, what: &str, done: impl Fn() -> bool) {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < PATIENCE, "waited in vain for {what}: {:?}\n{}", self.said(), self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: kill only sends a signal; the process is our child and has not been waited for.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// The exit status, once it has ended.
    pub fn exit(&mut self) -> i32 {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait().unwrap() {
                // What it said last is still on its way through the reading threads.
                std::thread::sleep(Duration::from_millis(100));
                return status.code().unwrap_or(-1);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the server did not end:\n{}", self.log());
    }

    pub fn get(&self, path: &str) -> Answer {
        let request = Request::get(path).header("authorization", "Bearer key");
        exchange(self.address, &request, Leave::Never).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// The sum of a metric's samples whose labels hold `label`.
    pub fn metric(&self, name: &str, label: &str) -> f64 {
        let text = self.get("/metrics").text();
        let samples = text.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
        samples.filter(|line| line.contains(label)).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    fn request(prompt: &str) -> Request {
        let body = json!({"prompt": prompt, "max_tokens": 16, "temperature": 0});
        Request::post("/v1/completions", &body).header("authorization", "Bearer key")
    }

    /// The text of a completion.
    pub fn complete(&self, prompt: &str) -> String {
        let answer = exchange(self.address, &Self::request(prompt), Leave::Never).unwrap();
        answer.json()["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{}", answer.text())).to_string()
    }

    /// Sends a request whose answer may never come.
    pub fn complete_without_waiting(&self, prompt: &str) {
        let (address, request) = (self.address, Self::request(prompt));
        std::thread::spawn(move || exchange(address, &request, Leave::Never));
        std::thread::sleep(Duration::from_millis(200));
        assert!(TcpStream::connect(self.address).is_ok());
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
