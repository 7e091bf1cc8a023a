//! Flag fields as newtypes: handshake, client, export (transmission), command and reply flags.

use std::fmt;
use std::ops::{BitOr, BitOrAssign};

/// Defines a flag type; the constants have the document's names without their prefixes.
macro_rules! flags {
    (
        $(#[$doc:meta])*
        $type:ident: $int:ty {
            $($(#[$flag_doc:meta])* $name:ident = $bit:literal;)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub struct $type($int);

        impl $type {
            /// No flags.
            pub const NONE: $type = $type(0);
            /// All flags that have a name here.
            pub const KNOWN: $type = $type(0 $(| (1 << $bit))*);
            $($(#[$flag_doc])* pub const $name: $type = $type(1 << $bit);)*

            /// The flags of a field as on the wire; unknown bits are preserved.
            pub const fn from_bits(bits: $int) -> $type {
                $type(bits)
            }

            /// The field as on the wire.
            pub const fn bits(self) -> $int {
                self.0
            }

            /// Whether all of `flags` are set.
            pub const fn contains(self, flags: $type) -> bool {
                self.0 & flags.0 == flags.0
            }

            /// Whether no flag is set.
            pub const fn is_empty(self) -> bool {
                self.0 == 0
            }

            /// The flags of either.
            pub const fn union(self, flags: $type) -> $type {
                $type(self.0 | flags.0)
            }

            /// These flags without `flags`.
            pub const fn without(self, flags: $type) -> $type {
                $type(self.0 & !flags.0)
            }

            /// These flags with `flags` set or cleared.
            pub const fn with(self, flags: $type, set: bool) -> $type {
                if set { self.union(flags) } else { self.without(flags) }
            }

            /// Bits without a name here.
            pub const fn unknown(self) -> $int {
                self.0 & !Self::KNOWN.0
            }
        }

        impl BitOr for $type {
            type Output = $type;

            fn bitor(self, flags: $type) -> $type {
                self.union(flags)
            }
        }

        impl BitOrAssign for $type {
            fn bitor_assign(&mut self, flags: $type) {
                *self = self.union(flags);
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let named = [$((stringify!($name), $type::$name),)*];
                let mut first = true;
                for (name, _) in named.iter().filter(|(_, flag)| self.contains(*flag)) {
                    f.write_str(if first { "" } else { "|" })?;
                    f.write_str(name)?;
                    first = false;
                }
                match self.unknown() {
                    0 if first => f.write_str("0"),
                    0 => Ok(()),
                    rest => write!(f, "{}{rest:#x}", if first { "" } else { "|" }),
                }
            }
        }
    };
}

flags! {
    /// Flags a newstyle server sends first ("Handshake flags").
    HandshakeFlags: u16 {
        /// Bit 0: the server speaks fixed newstyle.
        FIXED_NEWSTYLE = 0;
        /// Bit 1: the server can omit the zeroes after the reply to EXPORT_NAME.
        NO_ZEROES = 1;
    }
}

flags! {
    /// Flags of the client's reply ("Client flags"). A server disconnects clients that set others.
    ClientFlags: u32 {
        /// Bit 0: the client speaks fixed newstyle.
        FIXED_NEWSTYLE = 0;
        /// Bit 1: the server must omit the zeroes after the reply to EXPORT_NAME.
        NO_ZEROES = 1;
    }
}

flags! {
    /// Features of an export ("Transmission flags").
    ExportFlags: u16 {
        /// Bit 0: always set.
        HAS_FLAGS = 0;
        /// Bit 1: writes are refused.
        READ_ONLY = 1;
        /// Bit 2: FLUSH may be sent.
        SEND_FLUSH = 2;
        /// Bit 3: the FUA command flag may be set.
        SEND_FUA = 3;
        /// Bit 4: the medium rotates.
        ROTATIONAL = 4;
        /// Bit 5: TRIM may be sent.
        SEND_TRIM = 5;
        /// Bit 6: WRITE_ZEROES and NO_HOLE may be sent.
        SEND_WRITE_ZEROES = 6;
        /// Bit 7: the DF command flag may be set; needs structured replies.
        SEND_DF = 7;
        /// Bit 8: a flush or FUA write on one connection covers the completed writes of all.
        CAN_MULTI_CONN = 8;
        /// Bit 9: reserved for an unused experiment; never offered.
        SEND_RESIZE = 9;
        /// Bit 10: CACHE may be sent.
        SEND_CACHE = 10;
        /// Bit 11: the FAST_ZERO command flag may be set; needs SEND_WRITE_ZEROES.
        SEND_FAST_ZERO = 11;
        /// Bit 12: BLOCK_STATUS may carry a payload that selects contexts; needs extended headers.
        BLOCK_STATUS_PAYLOAD = 12;
    }
}

flags! {
    /// Flags of a request ("Command flags").
    CommandFlags: u16 {
        /// Bit 0: reply only when the data is on stable storage.
        FUA = 0;
        /// Bit 1: WRITE_ZEROES must not make a hole.
        NO_HOLE = 1;
        /// Bit 2: READ must be answered in at most one content chunk.
        DF = 2;
        /// Bit 3: BLOCK_STATUS must be answered with one extent per context.
        REQ_ONE = 3;
        /// Bit 4: WRITE_ZEROES must fail if it is not faster than writing.
        FAST_ZERO = 4;
        /// Bit 5: the length is that of a payload after the header (EXTENDED_HEADERS).
        PAYLOAD_LEN = 5;
    }
}

flags! {
    /// Flags of a reply chunk ("Structured reply flags"). Clients ignore unknown ones.
    ReplyFlags: u16 {
        /// Bit 0: the last chunk of its reply.
        DONE = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_the_documents() {
        assert_eq!(ExportFlags::BLOCK_STATUS_PAYLOAD.bits(), 0x1000);
        assert_eq!(ExportFlags::SEND_FAST_ZERO.bits(), 0x800);
        assert_eq!(CommandFlags::PAYLOAD_LEN.bits(), 0x20);
        assert_eq!(CommandFlags::KNOWN.bits(), 0x3f);
        assert_eq!(ClientFlags::from_bits(7).unknown(), 4);
    }

    #[test]
    fn sets_behave_like_sets() {
        let flags = CommandFlags::FUA | CommandFlags::NO_HOLE;
        assert!(flags.contains(CommandFlags::FUA) && !flags.contains(CommandFlags::DF));
        assert_eq!(flags.without(CommandFlags::FUA), CommandFlags::NO_HOLE);
        assert_eq!(flags.with(CommandFlags::DF, true).bits(), 7);
        assert_eq!(format!("{flags:?}"), "FUA|NO_HOLE");
        assert_eq!(format!("{:?}", CommandFlags::from_bits(0x101)), "FUA|0x100");
        assert_eq!(format!("{:?}", CommandFlags::NONE), "0");
    }
}
