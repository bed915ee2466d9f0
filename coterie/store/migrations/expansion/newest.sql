-- Written by `python -m coterie.store.newest --write`: what the migrations to this revision leave behind.
-- Revision: expansion_0003
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('expansion_0003');
CREATE TABLE graph_envelopes (
	graph INTEGER NOT NULL, 
	holder BLOB NOT NULL, 
	sealed BLOB NOT NULL, 
	PRIMARY KEY (graph, holder)
);
CREATE TABLE graph_orders (
	run_id VARCHAR NOT NULL, 
	least_epoch INTEGER NOT NULL, 
	PRIMARY KEY (run_id)
);
CREATE TABLE graph_refusals (
	graph INTEGER NOT NULL, 
	reason VARCHAR NOT NULL, 
	count INTEGER NOT NULL, 
	PRIMARY KEY (graph, reason)
);
CREATE TABLE graph_tags (
	graph INTEGER NOT NULL, 
	tag BLOB NOT NULL, 
	upload INTEGER NOT NULL, 
	PRIMARY KEY (graph, tag, upload)
)
 WITHOUT ROWID

;
CREATE TABLE graph_uploads (
	upload INTEGER NOT NULL, 
	graph INTEGER NOT NULL, 
	upload_id BLOB NOT NULL, 
	sequence INTEGER NOT NULL, 
	digest BLOB NOT NULL, 
	tags BLOB NOT NULL, 
	embedding BLOB NOT NULL, 
	questions INTEGER NOT NULL, 
	given INTEGER NOT NULL, 
	forgotten BOOLEAN NOT NULL, 
	PRIMARY KEY (upload), 
	UNIQUE (graph, upload_id)
);
CREATE TABLE graphs (
	graph INTEGER NOT NULL, 
	run_id VARCHAR NOT NULL, 
	epoch INTEGER NOT NULL, 
	generator BLOB NOT NULL, 
	expiry INTEGER NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (graph), 
	UNIQUE (run_id, epoch)
);
CREATE TABLE latent_combinations (
	number INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	vector BLOB NOT NULL, 
	PRIMARY KEY (number, position)
);
CREATE TABLE latent_sets (
	number INTEGER NOT NULL, 
	run_id VARCHAR NOT NULL, 
	epoch INTEGER NOT NULL, 
	closes INTEGER NOT NULL, 
	expiry INTEGER NOT NULL, 
	record BLOB NOT NULL, 
	state INTEGER NOT NULL, 
	key_users INTEGER NOT NULL, 
	PRIMARY KEY (number), 
	UNIQUE (run_id, epoch)
);
CREATE TABLE latent_uploads (
	number INTEGER NOT NULL, 
	upload_id BLOB NOT NULL, 
	digest BLOB NOT NULL, 
	vector BLOB NOT NULL, 
	forgotten BOOLEAN NOT NULL, 
	PRIMARY KEY (number, upload_id)
);
