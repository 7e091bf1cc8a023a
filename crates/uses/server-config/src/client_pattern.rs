//! Which clients a rule is about: an address or a range of addresses, the name of a certificate, a PSK identity.

use std::net::IpAddr;

use blockhaul_tls::DistinguishedName;

/// An address, or the addresses that share its first bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AddressRange {
    address: IpAddr,
    /// From 0 to 32 for IPv4, and to 128 for IPv6.
    prefix: u8,
}

impl AddressRange {
    /// Parses `ADDRESS` or `ADDRESS/BITS`. An IPv4 address that is mapped to IPv6 is that IPv4 address.
    ///
    /// # Errors
    /// A sentence for the user, if the text is neither.
    pub fn parse(text: &str) -> Result<AddressRange, String> {
        let wrong =
            || format!("{text:?} is not an address or a range of addresses such as 10.0.0.0/8");
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => {
                let is_number = prefix.bytes().all(|byte| byte.is_ascii_digit());
                let prefix = prefix.parse::<u8>().ok().filter(|_| is_number);
                (address, Some(prefix.ok_or_else(wrong)?))
            }
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.unwrap_or(longest);
        if prefix > longest {
            return Err(wrong());
        }
        match address.to_canonical() {
            mapped if mapped.is_ipv4() && address.is_ipv6() => {
                let prefix = prefix.checked_sub(96).ok_or_else(wrong)?;
                Ok(AddressRange { address: mapped, prefix })
            }
            address => Ok(AddressRange { address, prefix }),
        }
    }

    /// Whether an address is in the range. An IPv4 address that is mapped to IPv6 counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        let prefix = u32::from(self.prefix);
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let differing = u32::from(own) ^ u32::from(other);
                differing.checked_shr(32 - prefix).unwrap_or(0) == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let differing = u128::from(own) ^ u128::from(other);
                differing.checked_shr(128 - prefix).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

/// The clients that a rule is about: those that match each condition that is given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct ClientPattern {
    /// The address of the client is in one of these ranges; empty: any address, and Unix sockets.
    pub addresses: Vec<AddressRange>,
    /// The subject of the client's certificate.
    pub certificate: Option<DistinguishedName>,
    /// The identity with which the client has proved a pre-shared key.
    pub psk: Option<String>,
}

impl ClientPattern {
    /// Whether a client matches. `address` is `None` on a Unix socket; `certificate` and `psk` are authenticated names.
    pub fn matches(
        &self,
        address: Option<IpAddr>,
        certificate: Option<&DistinguishedName>,
        psk: Option<&str>,
    ) -> bool {
        let is_inside =
            |address| self.addresses.iter().any(|range: &AddressRange| range.contains(address));
        (self.addresses.is_empty() || address.is_some_and(is_inside))
            && is_required(self.certificate.as_ref(), certificate)
            && is_required(self.psk.as_deref(), psk)
    }
}

/// Whether a client's name is the one that is required, if one is.
fn is_required<T: PartialEq + ?Sized>(required: Option<&T>, name: Option<&T>) -> bool {
    required.is_none_or(|required| name == Some(required))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_contain_addresses_with_their_first_bits() {
        let contains = |range: &str, address: &str| {
            AddressRange::parse(range).unwrap().contains(address.parse().unwrap())
        };
        assert!(contains("10.0.0.0/8", "10.255.1.2") && !contains("10.0.0.0/8", "11.0.0.1"));
        assert!(contains("10.0.0.0/8", "::ffff:10.1.1.1"), "mapped to IPv6");
        assert!(contains("1.2.3.4", "1.2.3.4") && !contains("1.2.3.4", "1.2.3.5"));
        assert!(contains("0.0.0.0/0", "9.9.9.9") && !contains("0.0.0.0/0", "::1"));
        assert!(contains("fd00::/9", "fd7f::1") && !contains("fd00::/9", "fd80::1"));
        assert!(contains("::/0", "::1"));
        let mapped = AddressRange::parse("::ffff:10.0.0.0/104").unwrap();
        assert_eq!(mapped, AddressRange::parse("10.0.0.0/8").unwrap());
        for wrong in ["::ffff:10.0.0.0/95", "10.0.0.0/+8"] {
            assert!(AddressRange::parse(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "1.2.3", "1.2.3.4/33", "::1/129", "1.2.3.4/x", "localhost", "1.2.3.4/"] {
            assert!(AddressRange::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn each_condition_must_hold() {
        let range = AddressRange::parse("127.0.0.0/8").unwrap();
        let local = "127.0.0.1".parse().ok();
        let other = "10.0.0.1".parse().ok();
        let pattern = ClientPattern {
            addresses: vec![range],
            psk: Some("alice".into()),
            ..ClientPattern::default()
        };
        assert!(pattern.matches(local, None, Some("alice")));
        assert!(!pattern.matches(other, None, Some("alice")));
        assert!(!pattern.matches(None, None, Some("alice")), "a Unix socket has no address");
        assert!(!pattern.matches(local, None, Some("bob")));
        assert!(!pattern.matches(local, None, None));
        // A certificate does not stand for a key of the same name.
        let alice = DistinguishedName::parse("CN=alice").unwrap();
        assert!(!pattern.matches(local, Some(&alice), None));
        assert!(ClientPattern::default().matches(None, None, None));
    }
}
