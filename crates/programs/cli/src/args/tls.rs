//! Options and commands of `tls`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::value::count;

/// Options of `blockhaul tls`.
#[derive(Debug, Args)]
pub struct TlsArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: TlsCommand,
}

/// The commands of `blockhaul tls`.
#[derive(Debug, Subcommand)]
pub enum TlsCommand {
    /// Create an authority with certificates, or a file of keys
    ///
    /// Create a directory with an authority (ca-cert.pem, ca-key.pem) and certificates of a server
    /// and a client, or with --psk a file of pre-shared keys. Only their owner can read the files;
    /// existing files are not overwritten. --psk adds users to a file that exists. Move ca-key.pem to a safe place: whoever has it can sign
    /// more certificates.
    Init(TlsInit),
}

/// Options of `blockhaul tls init`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct TlsInit {
    /// Directory for certificates, or with --psk the file for keys
    #[arg(value_name = "PLACE")]
    pub place: PathBuf,

    /// Create a key for this user in the file PLACE, instead of certificates; may be repeated
    ///
    /// If the file exists, the key is added to it.
    #[arg(long, value_name = "USER", conflicts_with_all = ["host", "client", "days"])]
    pub psk: Vec<String>,

    /// Name or address of the server, as clients use it; may be repeated
    ///
    /// [default: the name of this machine, localhost, 127.0.0.1 and ::1]
    #[arg(long, value_name = "NAME")]
    pub host: Vec<String>,

    /// Name of the client
    #[arg(long, value_name = "NAME", default_value = "client")]
    pub client: String,

    /// Days for which the certificates of server and client are valid
    ///
    /// The certificate of the authority is valid for ten years.
    #[arg(long, value_name = "N", default_value = "730",
          value_parser = count::<u32>(1, 36500))]
    pub days: u32,

    /// Print the names of the files as JSON
    #[arg(long)]
    pub json: bool,
}

pub(super) const EXAMPLES: &str = "\
  Use keys, the simplest way:
      blockhaul tls init --psk alice keys.psk
      blockhaul serve --tls-psk keys.psk disk.raw
      blockhaul copy 'nbds://alice@server/?tls-psk-file=keys.psk' disk.raw
  Use certificates; copy ca-cert.pem, client-cert.pem and client-key.pem to the client:
      blockhaul tls init --host server.example pki
      blockhaul serve --tls-certificates pki --tls-verify-peer disk.raw
      blockhaul copy 'nbds://server.example/?tls-certificates=pki' disk.raw
";
