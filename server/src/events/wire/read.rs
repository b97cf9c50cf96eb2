//! Reading events, whatever shape they come in.

use std::fmt;

use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{Batch, Domain, Event, MAX_LEN, Stored, Tier, WireHash};

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Batch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("[timestamp, events, rank]")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Batch, A::Error> {
                let timestamp = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
                let events = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(1, &self))?;
                let rank = seq.next_element::<Option<u32>>()?.flatten();
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Batch { timestamp, events, rank })
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Batch, A::Error> {
                let mut batch = Batch { timestamp: 0.0, events: Vec::new(), rank: None };
                while let Some(field) = map.next_key::<String>()? {
                    match field.as_str() {
                        "ts" => batch.timestamp = map.next_value()?,
                        "events" => batch.events = map.next_value()?,
                        "data_parallel_rank" | "attn_dp_rank" | "dp_rank" => batch.rank = map.next_value()?,
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(batch)
            }
        }
        deserializer.deserialize_any(V)
    }
}

impl<'de> Deserialize<'de> for WireHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = WireHash;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a block's name: a 64-bit integer or bytes")
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<WireHash, E> {
                Ok(WireHash(value))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<WireHash, E> {
                Ok(WireHash(value.cast_unsigned()))
            }

            fn visit_bytes<E: Error>(self, value: &[u8]) -> Result<WireHash, E> {
                Ok(WireHash(xxhash_rust::xxh3::xxh3_64(value)))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<WireHash, E> {
                self.visit_bytes(value.as_bytes())
            }
        }
        deserializer.deserialize_any(V)
    }
}

/// Everything that any event may have, before it is known which one it is.
#[derive(Default)]
struct Fields {
    kind: String,
    stored: Stored,
    lora: bool,
    extra_keys: Vec<Option<Vec<ExtraKey>>>,
    cache_salt: Option<String>,
    group: u64,
}

enum ExtraKey {
    Text(String),
    Other,
}

impl<'de> Deserialize<'de> for ExtraKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = ExtraKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("anything")
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Text(value.to_owned()))
            }

            fn visit_u64<E: Error>(self, _: u64) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Other)
            }

            fn visit_i64<E: Error>(self, _: i64) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Other)
            }

            fn visit_bytes<E: Error>(self, _: &[u8]) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Other)
            }

            fn visit_unit<E: Error>(self) -> Result<ExtraKey, E> {
                Ok(ExtraKey::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<ExtraKey, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(ExtraKey::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ExtraKey, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(ExtraKey::Other)
            }
        }
        deserializer.deserialize_any(V)
    }
}

/// Positions of an array's fields after the kind, by kind.
const STORED: &[&str] = &[
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
];
const REMOVED: &[&str] = &["block_hashes", "medium"];

/// Reads the value of one field.
struct Field<'a> {
    name: &'a str,
    into: &'a mut Fields,
}

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let fields = self.into;
        match self.name {
            "type" => fields.kind = String::deserialize(deserializer)?,
            "block_hashes" => fields.stored.block_hashes = bounded(Vec::deserialize(deserializer)?)?,
            "parent_block_hash" => fields.stored.parent = Option::deserialize(deserializer)?,
            "token_ids" => fields.stored.token_ids = bounded(Vec::deserialize(deserializer)?)?,
            "block_size" => fields.stored.block_size = u32::deserialize(deserializer)?,
            "lora_id" | "lora_name" => {
                fields.lora |= Option::<IgnoredAny>::deserialize(deserializer)?.is_some()
            }
            "medium" => {
                let medium = Option::<String>::deserialize(deserializer)?;
                if medium.is_some_and(|medium| medium != "GPU") {
                    fields.stored.tier = Tier::Other;
                }
            }
            "extra_keys" => fields.extra_keys = Option::deserialize(deserializer)?.unwrap_or_default(),
            "cache_salt" => fields.cache_salt = Option::deserialize(deserializer)?,
            "group_idx" => fields.group = Option::deserialize(deserializer)?.unwrap_or_default(),
            _ => drop(IgnoredAny::deserialize(deserializer)?),
        }
        Ok(())
    }
}

fn bounded<T, E: Error>(list: Vec<T>) -> Result<Vec<T>, E> {
    match list.len() <= MAX_LEN {
        true => Ok(list),
        false => Err(E::custom(format!("a list of {} elements, expected at most {MAX_LEN}", list.len()))),
    }
}

impl Fields {
    fn event(mut self) -> Event {
        if self.group > 0 {
            self.stored.tier = Tier::Other;
        }
        match self.kind.as_str() {
            "BlockStored" => {
                self.stored.domain = self.domain();
                Event::BlockStored(self.stored)
            }
            "BlockRemoved" => {
                Event::BlockRemoved { block_hashes: self.stored.block_hashes, tier: self.stored.tier }
            }
            "AllBlocksCleared" => Event::AllBlocksCleared,
            _ => Event::Unknown(self.kind.chars().take(64).collect()),
        }
    }

    /// A salt is the only extra key of a prompt's first block; anything else is content that the tokens do not show.
    fn domain(&mut self) -> Domain {
        if self.lora {
            return Domain::Foreign;
        }
        let mut keys = std::mem::take(&mut self.extra_keys).into_iter();
        let first = keys.next().flatten().unwrap_or_default();
        if keys.any(|keys| keys.is_some_and(|keys| !keys.is_empty())) {
            return Domain::Foreign;
        }
        match (self.cache_salt.take(), <[ExtraKey; 1]>::try_from(first)) {
            (Some(salt), _) => Domain::Salted(salt),
            (None, Ok([ExtraKey::Text(salt)])) => Domain::Salted(salt),
            (None, Err(keys)) if keys.is_empty() => Domain::Plain,
            (None, _) => Domain::Foreign,
        }
    }
}

impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Event;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a KV event, as a map with a type or an array that begins with it")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Event, A::Error> {
                let mut fields = Fields::default();
                while let Some(name) = map.next_key::<String>()? {
                    map.next_value_seed(Field { name: &name, into: &mut fields })?;
                }
                Ok(fields.event())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Event, A::Error> {
                let kind: String = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
                let names = match kind.as_str() {
                    "BlockStored" => STORED,
                    "BlockRemoved" => REMOVED,
                    _ => &[],
                };
                let mut fields = Fields { kind, ..Fields::default() };
                for name in names {
                    if seq.next_element_seed(Field { name, into: &mut fields })?.is_none() {
                        break;
                    }
                }
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(fields.event())
            }
        }
        deserializer.deserialize_any(V)
    }
}
