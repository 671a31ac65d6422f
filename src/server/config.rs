//! Limits and names of the HTTP server: the `[server]` table of the configuration file.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Every key has a default; times are in seconds, sizes in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// Address to listen on. Beyond loopback without `api_key_file` a warning is logged.
    pub host: String,
    /// TCP port; 0 lets the system choose, and the chosen one is logged.
    pub port: u16,
    /// Further names under which clients may ask for the model (its own name always works).
    pub served_names: Vec<String>,
    /// File with one API key a line (empty lines and lines starting with `#` are skipped); read again on SIGHUP.
    pub api_key_file: Option<PathBuf>,
    /// Whether `/metrics` is open without a key, for scrapers inside the network.
    pub open_metrics: bool,
    /// Open connections. For one more, the one that has waited longest for a request is closed; where all have one, it is answered 503.
    pub max_connections: usize,
    /// Largest request body, in bytes.
    pub max_body_bytes: usize,
    /// Largest request head (request line and headers), in bytes.
    pub max_header_bytes: usize,
    /// Seconds a client may take to send a request head, idle time on a kept connection included.
    pub header_timeout_s: f64,
    /// Seconds a client may take to send a whole body.
    pub body_timeout_s: f64,
    /// Seconds a client may leave sent bytes unread before its connection is cut.
    pub write_timeout_s: f64,
    /// Seconds of silence after which a stream sends a comment line, so that proxies keep it open.
    pub keep_alive_s: f64,
    /// Seconds that running requests may take to end after SIGTERM.
    pub drain_s: f64,
    /// Seconds between the engine's death and the end of the process, for health checks to see it.
    pub death_grace_s: f64,
    /// Most choices of one request: prompts times `n`.
    pub max_choices: usize,
    /// `max_tokens` of a request that names none; absent = up to the context limit.
    pub default_max_tokens: Option<u32>,
    /// Seconds a client is told to wait after 429 and 503.
    pub retry_after_s: u64,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8000,
            served_names: Vec::new(),
            api_key_file: None,
            open_metrics: true,
            max_connections: 1024,
            max_body_bytes: 8 << 20,
            max_header_bytes: 64 << 10,
            header_timeout_s: 30.0,
            body_timeout_s: 60.0,
            write_timeout_s: 60.0,
            keep_alive_s: 10.0,
            drain_s: 30.0,
            death_grace_s: 2.0,
            max_choices: 128,
            default_max_tokens: None,
            retry_after_s: 1,
        }
    }
}

impl ServerConfig {
    /// Refuses values that cannot work, naming the key.
    pub fn check(&self) -> Result<(), String> {
        let times = [
            ("header_timeout_s", self.header_timeout_s),
            ("body_timeout_s", self.body_timeout_s),
            ("write_timeout_s", self.write_timeout_s),
            ("keep_alive_s", self.keep_alive_s),
            ("drain_s", self.drain_s),
            ("death_grace_s", self.death_grace_s),
        ];
        for (key, value) in times {
            if !(0.0..=86_400.0).contains(&value) {
                return Err(format!("server.{key} = {value}: wanted seconds from 0 to 86400"));
            }
        }
        if self.keep_alive_s < 0.01 {
            return Err(format!("server.keep_alive_s = {}: wanted at least 0.01 seconds", self.keep_alive_s));
        }
        let counts = [
            ("max_connections", self.max_connections, 1, 1 << 20),
            ("max_body_bytes", self.max_body_bytes, 1024, 1 << 40),
            ("max_header_bytes", self.max_header_bytes, 8192, 1 << 30),
            ("max_choices", self.max_choices, 1, 1 << 20),
        ];
        for (key, value, least, most) in counts {
            if !(least..=most).contains(&value) {
                return Err(format!("server.{key} = {value}: wanted {least} to {most}"));
            }
        }
        Ok(())
    }

    pub(crate) fn header_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.header_timeout_s.max(0.001))
    }

    pub(crate) fn body_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.body_timeout_s)
    }

    pub(crate) fn write_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.write_timeout_s)
    }

    pub(crate) fn keep_alive(&self) -> Duration {
        Duration::from_secs_f64(self.keep_alive_s)
    }

    pub(crate) fn drain(&self) -> Duration {
        Duration::from_secs_f64(self.drain_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_accepted() {
        assert_eq!(ServerConfig::default().check(), Ok(()));
        assert_eq!(toml::from_str::<ServerConfig>("").unwrap(), ServerConfig::default());
    }

    #[test]
    fn a_bad_value_or_key_is_named() {
        let bad = ServerConfig { drain_s: -1.0, ..Default::default() };
        assert!(bad.check().unwrap_err().contains("server.drain_s = -1"));
        for max_connections in [0, usize::MAX] {
            let bad = ServerConfig { max_connections, ..Default::default() };
            assert!(bad.check().unwrap_err().contains("max_connections"));
        }
        assert!(toml::from_str::<ServerConfig>("prot = 1").unwrap_err().to_string().contains("prot"));
    }
}
