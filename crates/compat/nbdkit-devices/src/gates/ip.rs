//! `ip`: admits clients by their address or process.

use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{Args, Client, Gate, GateKind, ParamKind, parse_number};
use rustix::net::AddressFamily;

use super::rule::{Guest, Rule, gate};
use blockhaul_layers::support::{param, usage};

/// The gate `ip`.
pub static IP: GateKind = GateKind {
    name: "ip",
    summary: "accepts or refuses clients by address",
    manual: "A client that matches `allow` is accepted; otherwise one that matches `deny` is disconnected \
before the handshake; otherwise it is accepted. So `deny=all` accepts only clients that match \
`allow`. Both are lists, separated by commas, of: an address (`192.168.0.1`, `::1`), a network \
(`10.0.0.0/8`, `fd00::/8`), `anyipv4`, `anyipv6`, `anyunix`, `anyvsock`, `any` (or `all`), and \
for clients on Unix sockets `pid:N`, `uid:N`, `gid:N`: the process, user and group that \
connected.",
    example: r#"
blockhaul serve -p 0 --layer 'ip?allow=127.0.0.1,::1,10.0.0.0/8&deny=all' sample:64M \
  --run 'blockhaul info "nbd://localhost:$port"'
"#,
    params: &[
        param("allow", ParamKind::Text, "Clients to accept."),
        param("deny", ParamKind::Text, "Clients to refuse, unless they match allow."),
    ],
    configure: |args, _| configure(args),
};

fn configure(args: &Args) -> Result<Arc<dyn Gate>> {
    let parse = |name: &str| -> Result<Vec<Match>> {
        let words = args.text(name).unwrap_or("").split(',').filter(|word| !word.is_empty());
        words.map(|word| Match::parse(name, word)).collect()
    };
    gate(Arc::new(Ip { allow: parse("allow")?, deny: parse("deny")? }))
}

struct Ip {
    allow: Vec<Match>,
    deny: Vec<Match>,
}

/// An element of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Match {
    Any,
    V4,
    V6,
    Unix,
    Vsock,
    /// A network: its address, and the prefix length.
    Net(IpAddr, u32),
    Pid(u32),
    Uid(u32),
    Gid(u32),
}

impl Match {
    fn parse(param: &str, word: &str) -> Result<Match> {
        let wrong = || {
            usage(format!(
                "ip: {param}: {word:?} is not an address, a network, any, anyipv4, anyipv6, \
                 anyunix, anyvsock, pid:N, uid:N or gid:N"
            ))
        };
        let number = |text: &str| parse_number::<u32>(text).map_err(|_| wrong());
        match word {
            "any" | "all" => return Ok(Match::Any),
            "anyipv4" | "allipv4" => return Ok(Match::V4),
            "anyipv6" | "allipv6" => return Ok(Match::V6),
            "anyunix" | "allunix" => return Ok(Match::Unix),
            "anyvsock" | "allvsock" => return Ok(Match::Vsock),
            _ => {}
        }
        if let Some(pid) = word.strip_prefix("pid:") {
            return number(pid).map(Match::Pid);
        }
        if let Some(uid) = word.strip_prefix("uid:") {
            return number(uid).map(Match::Uid);
        }
        if let Some(gid) = word.strip_prefix("gid:") {
            return number(gid).map(Match::Gid);
        }
        let (address, bits) = match word.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse().map_err(|_| wrong())?)),
            None => (word, None),
        };
        let unbracketed = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let address: IpAddr = unbracketed.unwrap_or(address).parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(most);
        if bits > most {
            return Err(wrong());
        }
        Ok(Match::Net(address, bits))
    }

    fn fits(&self, who: &Who) -> bool {
        match (self, who) {
            (Match::Any, _) => true,
            (Match::V4, Who::Ip(address)) => address.is_ipv4(),
            (Match::V6, Who::Ip(address)) => address.is_ipv6(),
            (Match::Unix, Who::Unix { .. }) | (Match::Vsock, Who::Vsock) => true,
            (Match::Net(net, bits), Who::Ip(address)) => same_net(*net, *address, *bits),
            (Match::Pid(wanted), Who::Unix { pid, .. }) => Some(*wanted) == *pid,
            (Match::Uid(wanted), Who::Unix { uid, .. }) => wanted == uid,
            (Match::Gid(wanted), Who::Unix { gid, .. }) => wanted == gid,
            _ => false,
        }
    }
}

/// Whether two addresses have the same prefix.
fn same_net(one: IpAddr, other: IpAddr, bits: u32) -> bool {
    match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => {
            let differ = u32::from(one) ^ u32::from(other);
            differ.checked_shr(32 - bits).unwrap_or(0) == 0
        }
        (IpAddr::V6(one), IpAddr::V6(other)) => {
            let differ = u128::from(one) ^ u128::from(other);
            differ.checked_shr(128 - bits).unwrap_or(0) == 0
        }
        _ => false,
    }
}

/// The identity of a client.
#[derive(Debug)]
enum Who {
    Ip(IpAddr),
    /// The process is unknown if it is in another container.
    Unix {
        pid: Option<u32>,
        uid: u32,
        gid: u32,
    },
    Vsock,
    Unknown,
}

impl Who {
    fn of(client: &Client) -> Who {
        let Some(stream) = &client.stream else { return Who::Unknown };
        if let Some(address) = stream.peer().ip() {
            // A client with an IPv4 address on a dual-stack socket.
            return Who::Ip(address.to_canonical());
        }
        match rustix::net::sockopt::socket_domain(stream.as_fd()) {
            Ok(AddressFamily::VSOCK) => Who::Vsock,
            Ok(AddressFamily::UNIX) => match blockhaul_os::Credentials::of_peer(stream.as_fd()) {
                Ok(Some(found)) => Who::Unix { pid: found.pid, uid: found.uid, gid: found.gid },
                _ => Who::Unix { pid: None, uid: u32::MAX, gid: u32::MAX },
            },
            _ => Who::Unknown,
        }
    }
}

struct Inside;

impl Guest for Inside {}

impl Rule for Ip {
    fn admit(self: Arc<Self>, client: &Client) -> Result<Arc<dyn Guest>> {
        let who = Who::of(client);
        let allowed = self.allow.iter().any(|rule| rule.fits(&who));
        if allowed || !self.deny.iter().any(|rule| rule.fits(&who)) {
            return Ok(Arc::new(Inside));
        }
        Err(Error::new(Kind::Refused, "ip: this client is denied"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_match_by_their_first_bits() {
        let fits = |word: &str, address: &str| {
            Match::parse("allow", word).unwrap().fits(&Who::Ip(address.parse().unwrap()))
        };
        assert!(fits("10.0.0.0/8", "10.255.1.2") && !fits("10.0.0.0/8", "11.0.0.1"));
        assert!(fits("1.2.3.4", "1.2.3.4") && !fits("1.2.3.4", "1.2.3.5"));
        assert!(fits("0.0.0.0/0", "9.9.9.9") && !fits("0.0.0.0/0", "::1"));
        assert!(fits("fd00::/9", "fd7f::1") && !fits("fd00::/9", "fd80::1"));
        assert!(fits("[::1]", "::1") && fits("::/0", "::1"));
        assert!(fits("anyipv6", "::1") && !fits("anyipv4", "::1") && fits("all", "::1"));
        for wrong in ["", "1.2.3", "1.2.3.4/33", "::1/129", "1.2.3.4/x", "uid:x", "localhost"] {
            assert_eq!(Match::parse("deny", wrong).unwrap_err().kind(), Kind::Usage, "{wrong}");
        }
        let local = Who::Unix { pid: Some(7), uid: 8, gid: 9 };
        for (word, expected) in
            [("pid:7", true), ("uid:7", false), ("gid:9", true), ("anyunix", true)]
        {
            assert_eq!(Match::parse("allow", word).unwrap().fits(&local), expected, "{word}");
        }
    }
}
