//! `ip`: admits clients by their address or process.

use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{ExportClient, Gate, GateKind, ParamKind, ParamValues, parse_number};
use rustix::net::AddressFamily;

use super::rule::{GateClient, GateRule, gate};
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

fn configure(args: &ParamValues) -> Result<Arc<dyn Gate>> {
    let parse = |name: &str| -> Result<Vec<ClientMatch>> {
        let words = args.text(name).unwrap_or("").split(',').filter(|word| !word.is_empty());
        words.map(|word| ClientMatch::parse(name, word)).collect()
    };
    gate(Arc::new(IpRule { allow: parse("allow")?, deny: parse("deny")? }))
}

struct IpRule {
    allow: Vec<ClientMatch>,
    deny: Vec<ClientMatch>,
}

/// An element of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ClientMatch {
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

impl ClientMatch {
    fn parse(param: &str, word: &str) -> Result<ClientMatch> {
        let wrong = || {
            usage(format!(
                "ip: {param}: {word:?} is not an address, a network, any, anyipv4, anyipv6, \
                 anyunix, anyvsock, pid:N, uid:N or gid:N"
            ))
        };
        let number = |text: &str| parse_number::<u32>(text).map_err(|_| wrong());
        match word {
            "any" | "all" => return Ok(ClientMatch::Any),
            "anyipv4" | "allipv4" => return Ok(ClientMatch::V4),
            "anyipv6" | "allipv6" => return Ok(ClientMatch::V6),
            "anyunix" | "allunix" => return Ok(ClientMatch::Unix),
            "anyvsock" | "allvsock" => return Ok(ClientMatch::Vsock),
            _ => {}
        }
        if let Some(pid) = word.strip_prefix("pid:") {
            return number(pid).map(ClientMatch::Pid);
        }
        if let Some(uid) = word.strip_prefix("uid:") {
            return number(uid).map(ClientMatch::Uid);
        }
        if let Some(gid) = word.strip_prefix("gid:") {
            return number(gid).map(ClientMatch::Gid);
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
        Ok(ClientMatch::Net(address, bits))
    }

    fn fits(&self, who: &ClientIdentity) -> bool {
        match (self, who) {
            (ClientMatch::Any, _) => true,
            (ClientMatch::V4, ClientIdentity::Ip(address)) => address.is_ipv4(),
            (ClientMatch::V6, ClientIdentity::Ip(address)) => address.is_ipv6(),
            (ClientMatch::Unix, ClientIdentity::Unix { .. })
            | (ClientMatch::Vsock, ClientIdentity::Vsock) => true,
            (ClientMatch::Net(net, bits), ClientIdentity::Ip(address)) => {
                same_net(*net, *address, *bits)
            }
            (ClientMatch::Pid(wanted), ClientIdentity::Unix { pid, .. }) => Some(*wanted) == *pid,
            (ClientMatch::Uid(wanted), ClientIdentity::Unix { uid, .. }) => wanted == uid,
            (ClientMatch::Gid(wanted), ClientIdentity::Unix { gid, .. }) => wanted == gid,
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
enum ClientIdentity {
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

impl ClientIdentity {
    fn of(client: &ExportClient) -> ClientIdentity {
        let Some(stream) = &client.stream else { return ClientIdentity::Unknown };
        if let Some(address) = stream.peer().ip() {
            // A client with an IPv4 address on a dual-stack socket.
            return ClientIdentity::Ip(address.to_canonical());
        }
        match rustix::net::sockopt::socket_domain(stream.as_fd()) {
            Ok(AddressFamily::VSOCK) => ClientIdentity::Vsock,
            Ok(AddressFamily::UNIX) => match blockhaul_os::PeerCredentials::of_peer(stream.as_fd())
            {
                Ok(Some(found)) => {
                    ClientIdentity::Unix { pid: found.pid, uid: found.uid, gid: found.gid }
                }
                _ => ClientIdentity::Unix { pid: None, uid: u32::MAX, gid: u32::MAX },
            },
            _ => ClientIdentity::Unknown,
        }
    }
}

struct IpClient;

impl GateClient for IpClient {}

impl GateRule for IpRule {
    fn admit(self: Arc<Self>, client: &ExportClient) -> Result<Arc<dyn GateClient>> {
        let who = ClientIdentity::of(client);
        let allowed = self.allow.iter().any(|rule| rule.fits(&who));
        if allowed || !self.deny.iter().any(|rule| rule.fits(&who)) {
            return Ok(Arc::new(IpClient));
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
            ClientMatch::parse("allow", word)
                .unwrap()
                .fits(&ClientIdentity::Ip(address.parse().unwrap()))
        };
        assert!(fits("10.0.0.0/8", "10.255.1.2") && !fits("10.0.0.0/8", "11.0.0.1"));
        assert!(fits("1.2.3.4", "1.2.3.4") && !fits("1.2.3.4", "1.2.3.5"));
        assert!(fits("0.0.0.0/0", "9.9.9.9") && !fits("0.0.0.0/0", "::1"));
        assert!(fits("fd00::/9", "fd7f::1") && !fits("fd00::/9", "fd80::1"));
        assert!(fits("[::1]", "::1") && fits("::/0", "::1"));
        assert!(fits("anyipv6", "::1") && !fits("anyipv4", "::1") && fits("all", "::1"));
        for wrong in ["", "1.2.3", "1.2.3.4/33", "::1/129", "1.2.3.4/x", "uid:x", "localhost"] {
            assert_eq!(
                ClientMatch::parse("deny", wrong).unwrap_err().kind(),
                Kind::Usage,
                "{wrong}"
            );
        }
        let local = ClientIdentity::Unix { pid: Some(7), uid: 8, gid: 9 };
        for (word, expected) in
            [("pid:7", true), ("uid:7", false), ("gid:9", true), ("anyunix", true)]
        {
            assert_eq!(ClientMatch::parse("allow", word).unwrap().fits(&local), expected, "{word}");
        }
    }
}
