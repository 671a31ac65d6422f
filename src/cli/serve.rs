//! `kdtree serve`: listen first, then load, warm up and gate on the engine thread, then answer.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use anyhow::Context;

use super::generate::start_logging;
use crate::config::{Config, Overrides};
use crate::engine::start::Prepared;
use crate::model::chat::ChatTemplate;
use crate::model::progress;
use crate::server::{self, Bound, Ended, Parts, ServerMetrics};

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub overrides: Overrides,
    /// Address to listen on
    #[arg(long, env = "KDTREE_HOST")]
    pub host: Option<String>,
    /// TCP port; 0 = any free one, named in the log
    #[arg(long, env = "KDTREE_PORT")]
    pub port: Option<u16>,
    /// File of API keys, one a line
    #[arg(long, env = "KDTREE_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<std::path::PathBuf>,
}

impl Args {
    fn config(&self) -> anyhow::Result<Config> {
        let mut config = self.overrides.load()?;
        if let Some(host) = &self.host {
            config.server.host.clone_from(host);
        }
        config.server.port = self.port.unwrap_or(config.server.port);
        if self.api_key_file.is_some() {
            config.server.api_key_file.clone_from(&self.api_key_file);
        }
        Ok(config)
    }
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let config = args.config()?;
    start_logging(&config.log)?;
    let prepared = Prepared::read(config.engine.clone())?;
    let template = if config.chat.builtin_template {
        ChatTemplate::builtin(prepared.tokenizer.clone())
    } else {
        ChatTemplate::load(&config.engine.target(), prepared.tokenizer.clone())
    };
    let chat = Arc::new(template?);
    let bound = Bound::bind(&config.server)?;
    let metrics = Arc::new(ServerMetrics::new(&prepared.info.name));
    metrics.set_verify_mode(&config.engine.verify.to_string());
    let certificate = Arc::new(OnceLock::new());
    let (engine, thread) = prepared.start(metrics.clone(), progress::for_this_process(), Box::new(|_| Ok(())));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().context("starting the runtime")?;
    let parts = Parts { engine, chat, metrics, certificate };
    let ended = runtime.block_on(server::serve(bound, config.server, parts));
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    match ended {
        Ok(Ended::Drained) => {
            // Every request has ended and every handle is gone: the engine thread ends by itself.
            let _ = thread.join();
            Ok(ExitCode::SUCCESS)
        }
        Ok(Ended::Stopped) => Ok(ExitCode::SUCCESS),
        Err(error) => Err(error),
    }
}
