//! What the gate's tests share: the command on a state directory of its own, changed models, and a service manager's side of a server.
#![allow(dead_code)]

pub mod command;
pub mod manager;
