//! The protocol of providers, version 1: a request in JSON is the last argument of the command, and replies are
//! lines of JSON on its standard output. The last line is a [`EndReply`], so that output that is cut off is noticed.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::FollowError;

/// The version of the protocol.
pub const VERSION: u32 = 1;
/// Maximum length of names of epochs, in bytes.
pub const EPOCH_MAX: usize = 256;

/// What a provider shall do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// Make a point in time of all disks, and print an offer for each.
    Round,
    /// Remove everything that the provider has made.
    End,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProviderRequest {
    /// [`VERSION`].
    pub version: u32,
    /// What to do.
    pub operation: Operation,
    /// The name of the machine.
    pub machine: String,
    /// The number of the round, from 1 on; repeated in each reply.
    pub round: u32,
    /// The machine is stopped: nothing changes after this round.
    pub last: bool,
    /// The disks.
    pub disks: Vec<RequestedDisk>,
}

/// A disk of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedDisk {
    /// Its name.
    pub name: String,
    /// The epoch that the target has: changes since then are needed, and older epochs are not. `None`: all of the disk.
    pub since: Option<String>,
    /// The epoch of an interrupted round: if the same point in time is still there, offer it again.
    pub resume: Option<String>,
}

/// The point in time of a disk that a provider offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoundOffer {
    /// [`VERSION`].
    pub version: u32,
    /// The number of the round.
    pub round: u32,
    /// The name of the disk.
    pub disk: String,
    /// Bytes of the disk.
    pub size: u64,
    /// The description of the device that shows the disk at this point in time.
    pub source: String,
    /// The name of this point in time: another one for each.
    pub epoch: String,
    /// The epoch at which the list or bitmap begins; `None`: it is a full round.
    #[serde(default)]
    pub since: Option<String>,
    /// A file with the list of changes since then.
    #[serde(default)]
    pub ranges: Option<PathBuf>,
    /// A metadata context of the source with the changes since then.
    #[serde(default)]
    pub bitmap: Option<String>,
}

/// The last line of a reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndReply {
    /// [`VERSION`].
    pub version: u32,
    /// The number of the round.
    pub round: u32,
    /// The operation that was carried out.
    pub end: Operation,
}

/// A line of a reply.
#[derive(Deserialize)]
#[serde(untagged)]
enum ReplyLine {
    Offer(RoundOffer),
    End(EndReply),
}

/// Collects the lines of a reply.
#[derive(Debug)]
pub struct ReplyReader<'a> {
    request: &'a ProviderRequest,
    offers: Vec<RoundOffer>,
    has_ended: bool,
}

impl<'a> ReplyReader<'a> {
    /// A reader of the reply to `request`.
    pub fn new(request: &'a ProviderRequest) -> ReplyReader<'a> {
        ReplyReader { request, offers: Vec::new(), has_ended: false }
    }

    /// Adds a line.
    ///
    /// # Errors
    /// If it is not a reply to this request.
    pub fn line(&mut self, line: &str) -> Result<(), FollowError> {
        if line.trim().is_empty() {
            return Ok(());
        }
        let shown = || blockhaul_transfer::one_line(&line.chars().take(200).collect::<String>());
        if self.has_ended {
            return Err(FollowError::provider(format!(
                "the provider prints more after its end: {}",
                shown()
            )));
        }
        let parsed: ReplyLine = serde_json::from_str(line).map_err(|_| {
            FollowError::provider(format!(
                "the provider prints a line that is no reply of version {VERSION}: {}: print messages on standard \
                 error",
                shown()
            ))
        })?;
        let (version, round) = match &parsed {
            ReplyLine::Offer(offer) => (offer.version, offer.round),
            ReplyLine::End(end) => (end.version, end.round),
        };
        if version != VERSION || round != self.request.round {
            return Err(FollowError::provider(format!(
                "the provider answers for version {version} and round {round}, not for version {VERSION} and round \
                 {}",
                self.request.round
            )));
        }
        match parsed {
            ReplyLine::End(end) if end.end == self.request.operation => self.has_ended = true,
            ReplyLine::Offer(offer) if self.request.operation == Operation::Round => {
                self.offers.push(offer);
                if self.offers.len() > self.request.disks.len() {
                    return Err(FollowError::provider(
                        "the provider offers more disks than were requested",
                    ));
                }
            }
            _ => {
                return Err(FollowError::provider(format!(
                    "the provider answers another request: {}",
                    shown()
                )));
            }
        }
        Ok(())
    }

    /// The offers, once the command has ended.
    ///
    /// # Errors
    /// If the last line is missing.
    pub fn finish(self) -> Result<Vec<RoundOffer>, FollowError> {
        if !self.has_ended {
            return Err(FollowError::provider(
                "the reply of the provider is cut off: its last line must have \"end\"",
            ));
        }
        Ok(self.offers)
    }
}
